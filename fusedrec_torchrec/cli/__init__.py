"""The ``fusedrec`` command.

In reading order: ``main`` (the command and its exit codes), ``commands`` (which there are),
``manual`` and ``settings`` (help that reads like a manual page, with all settings of a
configuration file), ``json_output`` (``--json``), ``numbers`` and ``outputs`` (types of arguments),
then a file for each subcommand: ``train`` and ``watch``; ``checkpoint``, whose actions are in
``checkpoint_actions``; ``prepare``, ``profile``, whose figures are in ``profile_figures``, and
``separate`` for data; ``plan``, ``simulate`` and ``calibrate`` for the planner; ``bench``,
``inspect``, ``doctor`` and ``version``; ``completion``, which makes a ``command_tree`` of all of
them into a script: ``bash_script``, ``zsh_script``, ``fish_script``.

Parsers and checks of arguments and configuration files need neither torch nor TorchRec: what takes
seconds to import is imported where a command begins its work, so mistakes are answered at once.
"""
