"""The .safetensors files of a directory of Hugging Face: which there are, and slices of their tensors."""
import re

from interface.schema import check_schema, load_json_of_others

MOST_INDEX_BYTES = 2**27  # of model.safetensors.index.json: a model of 70,000 tensors has 8 MB
BUFFERS = re.compile(r".*(\.attn\.(masked_)?bias|\.rotary_emb\.inv_freq)")  # not weights: masks, frequencies


def open_safetensors(folder):
    """Return {name: slice} of all tensors of a directory of Hugging Face; a slice reads from the file.

    ValueError, OSError: the directory has no such files, or they are damaged.
    """
    from safetensors import SafetensorError, safe_open
    found = {}
    for name in list_safetensors(folder):
        try:
            handle = safe_open(folder / name, framework="pt")
            for key in handle.keys():  # noqa: SIM118
                if not BUFFERS.fullmatch(f".{key}"):
                    found[key] = handle.get_slice(key)
        except (SafetensorError, OSError) as e:
            raise ValueError(f"{folder / name} is damaged ({e}); download it again") from None
    return found


def list_safetensors(folder):
    """Return the names of the .safetensors files of a directory of Hugging Face.

    ValueError, OSError: a file is missing, or a name leads out of the directory.
    """
    names = ["model.safetensors"]
    index = folder / "model.safetensors.index.json"
    # An index beside model.safetensors may belong to an older save.
    if index.exists() and not (folder / names[0]).exists():
        listed = load_json_of_others(index, MOST_INDEX_BYTES)
        check_schema(listed, {"weight_map": {"*": str}}, index)
        names = sorted(set(listed["weight_map"].values()))
    for name in names:
        if not re.fullmatch(r"[\w-][\w.-]*\.safetensors", name):
            raise ValueError(f"{index} names the file {name!r}, no .safetensors beside it")
        if not (folder / name).is_file():
            if (folder / name).exists():
                raise ValueError(f"{folder / name} is a pipe, a device or a directory, not a file; "
                                 "download it again")
            if not folder.is_dir():
                raise FileNotFoundError(f"{folder} is no directory; give that of a downloaded model")
            raise FileNotFoundError(f"{folder} holds no {name}; files of other kinds (.bin, .pt) can run "
                                    "code and are not read: save the model again with transformers")
    return names


def same_matrix(a, b):
    """Whether two slices of matrices have the same shape and values; blocks of whole rows are read."""
    rows, columns = a.get_shape()
    if b.get_shape() != [rows, columns]:
        return False
    step = max(1, 2**24 // max(1, columns))
    return all(bool((a[i:i + step] == b[i:i + step]).all()) for i in range(0, rows, step))
