"""Checkpoints that fit every sharding and every number of ranks, TorchRec's included.

Files, in reading order:

- ``file_names``: what the files of a checkpoint are called;
- ``save``, ``writer``: write what torch.distributed.checkpoint would, with checksums;
- ``manifest``: what a checkpoint holds, in a file that people and programs can read;
- ``codec_state``: what codecs keep from step to step, which is saved beside the weights;
- ``load``: loads into a model of another sharding or number of ranks;
- ``table_state``: an optimizer state under the names and shapes that other shardings have for it;
- ``local_shards``: the shards of a tensor that a rank holds;
- ``reader``: reads any box of any tensor;
- ``verify``: compares files with their checksums;
- ``contents``, ``convert``, ``export``: tables of a checkpoint, as another sharding would have
  written them, or as files for serving.

What somebody else wrote is not trusted: ``inert_pickle`` reads a pickle without running it,
``safe_metadata`` makes metadata of it (``boxes`` finds overlapping chunks), ``torch_file`` reads
what ``torch.save`` wrote, ``plain_objects`` builds plain data of it (``dtypes`` has their types).
"""
