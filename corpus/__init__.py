"""From text to samples: readers, tokenizers, token files, and the order in which a run reads them."""
