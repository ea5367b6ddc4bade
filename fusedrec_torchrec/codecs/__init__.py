"""How rows and gradients travel: as they are, in fewer bits, or only the entries that matter.

The system is dynamic communication thresholding (DCT, KDD 2021): entries that reach a threshold
travel, the others do not.  Files, in reading order:

- ``options``: what a user can choose for rows and their gradients (``CodecOptions``, ``Codecs``);
- ``codec``: the interface that every codec implements, and the ``Entries`` that a codec selects;
- ``numbers``: fp32, fp16 and bf16, number by number;
- ``int8``: rows as bytes with a scale and a bias;
- ``threshold``: the threshold that a wanted share of numbers reaches, renewed now and then;
- ``dct``: the codec ``dct``, which sends the entries of rows that reach the threshold;
- ``registry``: codecs of TorchRec's ``qcomm_codecs_registry``, for fused tables;
- ``wire``: builds codecs, and puts the rows of all buckets through theirs into one buffer;
- ``traffic``: counts the bytes that codecs have saved;
- ``threshold_options``, ``dense_gradients``: DCT for data-parallel gradients, with error feedback.
"""
