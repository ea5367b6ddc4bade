"""Calibration: the links and rates of a cluster, from steps that were measured on it.

===================  ============================================================================
``measure``          collectives and training steps of many shapes, on all ranks
``fresh_processes``  every measurement in a new process
``stage_times``      groups of stages of a fused step, and the rates that they tell apart
``fit``              from measured steps to links and rates
===================  ============================================================================
"""
