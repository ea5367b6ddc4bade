"""Access: how the rows of tables are used, counted or assumed.

==================  =============================================================================
``samples``         samples in memory, and the interface of what holds them
``synthetic``       generated clicks whose ids follow a Zipf law
``heavy_hitters``   which keys are used most, in bounded memory
``bag_counts``      how many bags of a batch are distinct, counted
``access_profile``  how often rows were accessed, as a file
``recorder``        counts accesses into a profile, and merges profiles
``profile``         counting accesses of a data set, and figures of them
``array_file``      the format of access profiles and hot sets
``hot_set``         which rows are hot, and which samples need no others
``row_classes``     how often rows are used, and how many of them a batch meets
``distinct_bags``   how many bags of a batch are distinct by chance
``replication``     when a replica of a row pays: the price of hot rows and of the planner
==================  =============================================================================
"""
