"""Reports: plans and simulations for people.

=================  ===============================================================================
``explain``        what was chosen, what else it would have cost, what limits, what helps; as text
``figures``        the same for programs
``reasons``        why a fused table is pooled where it is, in words
``html_report``    the same as one interactive HTML file
``scaling_table``  a table of simulated systems over the size of a cluster
``scaling_plot``   a figure of simulated systems over the size of a cluster
``stats``          TorchRec's printed statistics, with fused tables in them
=================  ===============================================================================
"""
