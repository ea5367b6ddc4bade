"""Click data: Criteo's files, their prepared form, a generator, and the way into training.

In the order the data flows: ``lines`` (text files in blocks), ``criteo`` (blocks to columns),
``vocabulary`` (values to rows), ``prepare`` (text to parquet), ``prepared`` and ``synthetic`` (two
sources of samples), ``order`` (which samples make a batch), ``loader`` (batches in worker
processes), ``profile`` (how the rows of the tables are accessed).
"""
