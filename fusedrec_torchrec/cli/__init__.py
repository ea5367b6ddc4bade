"""The ``fusedrec`` command.

In reading order: ``main`` (the command and its exit codes), ``settings`` (the settings of a
configuration file, for ``--help``), ``numbers`` and ``outputs`` (types of arguments), then a file
for each subcommand: ``train``; ``checkpoint``, whose actions are in ``checkpoint_actions``;
``prepare``, ``profile``, whose figures are in ``profile_figures``, and ``separate`` for data;
``plan``, ``simulate`` and ``calibrate`` for the planner; ``bench``, ``inspect``, ``doctor`` and
``version``.

Parsers and checks of arguments and configuration files need neither torch nor TorchRec: what takes
seconds to import is imported where a command begins its work, so mistakes are answered at once.
"""
