"""Click data: Criteo's files or others, their prepared form, and the way into training.

Files, in the order the data flows:

- ``data_config``: what data a run trains on, as a user says it;
- ``lines``: text files, plain or packed, as blocks of whole lines;
- ``delimited``: lines to columns of text;
- ``bad_lines``: malformed lines, counted and named;
- ``criteo``: blocks of lines in Criteo's format to columns;
- ``table_options``: what a user can say about files with columns of their own;
- ``table_files``: such files, as blocks of rows;
- ``table_columns``: their columns as texts, numbers, times and bags;
- ``expression``, ``label``: labels from expressions of columns;
- ``keys``: numbers that stand for texts;
- ``dense_transform``: numbers that are fit for a model;
- ``table_samples``: rows to samples, with the five above;
- ``raw_source``, ``criteo_source``, ``table_source``: what a preparation reads;
- ``infer``, ``infer_yaml``: suggests what to say about files, and writes it down;
- ``vocabulary``, ``value_rows``: values of a column to rows of a table;
- ``parquet``: parquet files whose errors name the file;
- ``prepare_options``, ``prepare``, ``preparation``: files to parquet (``spelling``: how messages
  spell a setting);
- ``file_names``, ``prepared_files``, ``prepared``: prepared data, as files and as a source of
  samples (``access.synthetic`` is another source, ``faulty`` one with bad samples for drills);
- ``summary``: shows what prepared data holds;
- ``separate``: prepared data with its hot samples first;
- ``split``: which samples are held out;
- ``order``: which samples make which batch;
- ``alternation``, ``hot_first``: how hot and cold batches alternate and are formed;
- ``batch_check``: whether a batch can be trained on;
- ``loader``, ``separated_loader``: batches for one rank, read ahead in worker processes;
- ``own_batches``, ``frames``: batches and tables of a Python program.
"""
