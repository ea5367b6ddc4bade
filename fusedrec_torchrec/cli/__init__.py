"""The ``fusedrec`` command."""
