"""`reshard`: a checkpoint cut anew, by one process, a block at a time.

Loading cuts as it likes, so this is never needed to change a mesh. It makes files that suit the readers: one a rank, so that each
opens one file and reads it from front to back.
"""

from __future__ import annotations

from functools import partial

from ottava.checkpoint.digest import algorithm
from ottava.checkpoint.files import About, encode_state
from ottava.checkpoint.reader import Reader
from ottava.checkpoint.storage import Location, storage_at
from ottava.checkpoint.stream import Stream, write_streams


def reshard(
    source: Location, target: Location, shards: int = 1, *, block_bytes: int = 64 << 20, hash: str | None = None
) -> Location:
    """Writes the checkpoint `source` into the directory of checkpoints `target`, in `shards` files; where it is then.

    Rows of each tensor are spread evenly over the files. A few blocks of `block_bytes` are in memory at a time. The source is
    verified first, and the result is committed as every checkpoint is.

        >>> reshard("run/checkpoints/step-00000100", "eight/checkpoints", shards=8)
        PosixPath('/home/me/eight/checkpoints/step-00000100')
    """
    reader = Reader(source)
    streams = {name: Stream(e.dtype, e.shape, partial(reader.read, name)) for name, e in reader.entries.items()}
    about = About(reader.manifest.step, shards, [{"shards": shards}], algorithm(hash))
    state = encode_state(reader.values, reader.config)
    return write_streams(storage_at(target), about, streams, state, shards, block_bytes)
