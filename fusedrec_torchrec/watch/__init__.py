"""What runs have recorded, in the terminal and in a browser, while they train and afterwards.

Files, in reading order:

- ``records``: the records of a run as they are written;
- ``run``: the folder of a run, and how far the run is;
- ``panels``: which figures are drawn, with titles and units;
- ``document``: all of that as plain data, which every view shows;
- ``plots``: curves and bars made of letters;
- ``frame``: one picture for the terminal, and ``live``: one after another;
- ``server``: a small server for a browser on this machine; its page is in ``page.html``,
  ``page.css`` and ``page.js``.

Nothing here imports torch, and nothing is written: a run does not notice that it is watched.
"""
