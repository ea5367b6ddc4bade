"""The fused sharding types as shardings of TorchRec: plans in, sharded modules out.

======================  =========================================================
``sharding_type``       their names
``plan_entries``        a table's part of a plan, and ``fused_row_wise()`` and others to write one
``plan_file``           plans as files
``plan_conversion``     plans of TorchRec as such files, and back
``plan_diff``           what differs between two of them
``grid_options``        settings of 2D parallelism, which plans know, too
``optimizer_config``    the tables' optimizer in configuration files
``fused_params``        the same in FBGEMM's terms
``shardable_modules``   the modules of a model that can be sharded
``module_settings``     what a sharder has decided, as a part of the plan's entries
``replicated_env``      environments whose shards have replicas elsewhere
``early_checks``        tables whose rows cannot be sent early
``embedding_sharding``  the fused tables of a module: plan in, stages of the exchange out
``modules``             the sharded modules
``sharders``            what a user registers in DistributedModelParallel
``train_pipeline``      TorchRec's training pipeline, with rows that arrive early
======================  =========================================================
"""
