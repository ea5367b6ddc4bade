"""The planner: which table is sharded how, on which cluster, and what a step then costs.

====================  ===========================================================================
``config``            what to plan for whom: the tree behind ``configs/planner/*.yaml``
``cost/``             what a training step costs on a cluster
``search/``           the search for the plan whose step is shortest
``fit_tables``        which tables can be fused, and which of them their owners can pool
``model_tables``      the tables of a model as the cost model sees them, a decision as a plan
``topology``          a cluster as TorchRec's estimators and partitioners see it
``planning``          a planning task, and a model of tables that a file lists
``write``             a decision as a plan file
``planner``           TorchRec's planner that also plans fused tables, by cost if it may
``columns_apart``     columns of a fused table on ranks that differ, in plans of TorchRec's search
``constraints``       TorchRec's constraints on tables, for the search of the cost model
``decided_options``   a decision as the sharding options that TorchRec's tools read
``enumerator``        fused options among those that TorchRec's own search chooses from
``option_load``       the table of such an option as the cost model sees it
``batch_profile``     how rows and bags are used in a few batches of a training script
``bag_lengths``       a warning if nobody has said how long bags are
``estimators``        time and memory of fused options, in TorchRec's units
``report/``           plans for people: text, HTML, statistics and figures
``simulate``          the cost model over many sizes of a cluster
``calibrate/``        links and rates of a cluster, measured
====================  ===========================================================================
"""
