"""The search: decisions of a plan, at the prices of the cost model.

=================  ==============================================================================
``search_config``  what may be decided
``decision``       a plan as the cost model sees it, and its price
``decide``         the search: the shortest step that fits into memory
``assign``         which table is sharded how
``refine``         what is decided about fused tables afterwards
``replicate``      which rows are hot
=================  ==============================================================================
"""
