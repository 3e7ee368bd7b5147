"""A reader of zstd streams over the system's libzstd, which dpkg itself needs on Debian and Ubuntu.

Python has a module of its own only from 3.14 on.
"""

from __future__ import annotations

import ctypes
import functools
import io
from typing import BinaryIO

from tpuforge.errors import Exit, ForgeError

_LIBRARY = "libzstd.so.1"
_CHUNK = 1 << 20


class _Buffer(ctypes.Structure):
    """``ZSTD_inBuffer`` and ``ZSTD_outBuffer``: the same three fields (zstd.h)."""

    _fields_ = (("data", ctypes.c_void_p), ("size", ctypes.c_size_t), ("pos", ctypes.c_size_t))


@functools.cache
def _library() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise ForgeError(
            f"the library {_LIBRARY} cannot be loaded: {error}",
            expected="libzstd, to look into image layers",
            mend="sudo apt-get install libzstd1",
        ) from error
    library.ZSTD_createDStream.restype = ctypes.c_void_p
    library.ZSTD_freeDStream.argtypes = [ctypes.c_void_p]
    library.ZSTD_decompressStream.restype = ctypes.c_size_t
    library.ZSTD_decompressStream.argtypes = [
        ctypes.c_void_p,
        ctypes.POINTER(_Buffer),
        ctypes.POINTER(_Buffer),
    ]
    library.ZSTD_isError.argtypes = [ctypes.c_size_t]
    library.ZSTD_getErrorName.argtypes = [ctypes.c_size_t]
    library.ZSTD_getErrorName.restype = ctypes.c_char_p
    return library


class Reader(io.RawIOBase):
    """The plain bytes of a zstd stream, read from its start to its end.

    Args:
        source: The compressed bytes; the caller closes it.

    Raises:
        ForgeError: While reading, if the stream is damaged or cut short; exit code 1.
    """

    def __init__(self, source: BinaryIO) -> None:
        self._zstd = _library()
        self._stream = self._zstd.ZSTD_createDStream()
        self._source = source
        self._chunk = b""
        self._in = _Buffer(None, 0, 0)
        self._room = ctypes.create_string_buffer(_CHUNK)
        self._hint = 1

    def readable(self) -> bool:
        """Always true."""
        return True

    def close(self) -> None:
        """Give the decompressor's memory back."""
        if self._stream:
            self._zstd.ZSTD_freeDStream(self._stream)
            self._stream = None
        super().close()

    def readall(self) -> bytes:
        """Everything that is left."""
        return b"".join(iter(lambda: self.read(_CHUNK), b""))

    def read(self, count: int = -1) -> bytes:
        """Plain bytes.

        Args:
            count: How many; fewer come at the end only. All that are left when negative.
        """
        if count < 0:
            return self.readall()
        parts: list[bytes] = []
        while count > 0 and (part := self._some(min(count, _CHUNK))):
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    def _some(self, most: int) -> bytes:
        out = _Buffer(ctypes.addressof(self._room), most, 0)
        while out.pos == 0:
            if self._in.pos == self._in.size:
                self._chunk = self._source.read(_CHUNK)
                if not self._chunk:
                    if self._hint:
                        raise _damaged("it ends too early")
                    return b""
                # the chunk stays referenced by self for as long as the library may read it
                pointer = ctypes.cast(ctypes.c_char_p(self._chunk), ctypes.c_void_p)
                self._in = _Buffer(pointer, len(self._chunk), 0)
            self._hint = self._zstd.ZSTD_decompressStream(
                self._stream, ctypes.byref(out), ctypes.byref(self._in)
            )
            if self._zstd.ZSTD_isError(self._hint):
                raise _damaged(self._zstd.ZSTD_getErrorName(self._hint).decode())
        return ctypes.string_at(self._room, out.pos)


def _damaged(what: str) -> ForgeError:
    return ForgeError(
        f"a zstd stream is damaged: {what}",
        expected="a whole, intact layer",
        mend="./forge bake --no-cache",
        exit_code=Exit.FAULT,
    )
