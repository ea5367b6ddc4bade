"""Click data: Criteo's files, their prepared form, and the way into training.

Files, in the order the data flows:

- ``lines``: text files, plain or gzipped, as blocks of whole lines;
- ``criteo``: blocks of lines to columns;
- ``vocabulary``: values of a column to rows of a table;
- ``parquet``: parquet files whose errors name the file;
- ``prepare_options``, ``prepare``: text to parquet, with the three above (``spelling``: how
  messages spell a setting);
- ``file_names``, ``prepared_files``, ``prepared``: prepared data, as files and as a source of
  samples (``access.synthetic`` is another source, ``faulty`` one with bad samples for drills);
- ``summary``: shows what prepared data holds;
- ``separate``: prepared data with its hot samples first;
- ``split``: which samples are held out;
- ``order``: which samples make which batch;
- ``alternation``, ``hot_first``: how hot and cold batches alternate and are formed;
- ``batch_check``: whether a batch can be trained on;
- ``loader``, ``separated_loader``: batches for one rank, read ahead in worker processes.
"""
