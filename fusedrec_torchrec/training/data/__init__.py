"""Click data: Criteo's files, their prepared form, and the way into training.

In the order the data flows: ``lines`` (text files in blocks), ``criteo`` (blocks to columns),
``vocabulary`` (values to rows), ``prepare_options``, ``prepare`` (text to parquet), ``prepared`` (a
source of samples; ``access.synthetic`` is another), ``split`` (which samples are held out),
``order`` (which samples make a batch), ``loader`` (batches in worker processes).
"""
