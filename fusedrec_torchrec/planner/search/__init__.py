"""The search: decisions of a plan, at the prices of the cost model.

=================  ==============================================================================
``search_config``  what may be decided
``decision``       a plan as the cost model sees it, and its price
``decide``         the search: the shortest step that fits into memory
``owners``         ranks that can have all rows of a table, or columns of all rows
``prices``         what tables and shardings cost, one by one
``assign``         which table is sharded how
``refine``         what is decided about fused tables afterwards
``replicate``      which rows are hot
=================  ==============================================================================
"""
