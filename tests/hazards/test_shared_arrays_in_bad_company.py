"""Other programs fill, forge, truncate or forbid the memory of shared arrays."""

import ctypes
import errno
import os
import struct
from pathlib import Path
from typing import Final

import numpy as np
import pytest
from helpers import segment_layout as layout
from helpers.apart import Apart, Pipe, apart, needs_own_shm, needs_root, run_apart
from helpers.full_memory import PAGE, SIZE, free_bytes, leave
from helpers.own_shm import MIB
from helpers.segment_file import SegmentFile
from helpers.watched_reserving import Reservation, needs_listener, watched

import shmacc
from shmacc import SharedArrays, TensorSpec, errors, inspection, testing
from shmacc._base import names

NAME: Final = "company"

# Offsets in Config: the directory's length, its checksum, Config's own checksum at its end.
DIRECTORY_BYTES, DIRECTORY_CHECKSUM, CONFIG_END = 96, 104, 312
DIRECTORY: Final = layout.REGION_SPAN
# Offsets in the directory's first entry: the dtype, the rank, the first dimension, the name.
DTYPE, RANK = layout.DirectoryEntry.dtype.offset, layout.DirectoryEntry.declared_rank.offset
FIRST_DIM: Final = ctypes.sizeof(layout.DirectoryEntry)
NAME_BYTES: Final = FIRST_DIM + 8


def path() -> Path:
    return Path(names.segment_name(NAME).path)


# -- a full /dev/shm ------------------------------------------------------------------------------


@needs_own_shm
@apart(shm=SIZE)
def test_creating_arrays_in_nearly_full_memory_succeeds_or_raises() -> None:
    given = np.ones(10 * PAGE, np.uint8)
    contents = {"given": given, "zeros": TensorSpec((10 * PAGE,), "uint8"), "one": 1.0}
    failed = 0
    for room in range(0, 40 * PAGE, PAGE):
        leave(room)
        try:
            params = SharedArrays(contents, NAME)
        except errors.ResourceExhaustedError as error:
            failed += 1
            said = str(error)
            assert "--shm-size" in said
            assert testing.leaked_names() == ()
            assert free_bytes() == room
        else:
            params["zeros"][:] = 3  # all its memory is reserved
            params["given"] += params["zeros"]
            assert set(params["given"].tolist()) == {4}
            params.unlink()
            params.close()
            del params
            assert testing.leaked_names() == ()
    assert 20 < failed < 35


TOTAL: Final = 3 * 8 * MIB


def _refused() -> errors.ResourceExhaustedError:
    three = {name: TensorSpec((8 * MIB,), "uint8") for name in "abc"}
    with pytest.raises(errors.ResourceExhaustedError) as caught:
        SharedArrays(three, NAME)
    return caught.value


@needs_own_shm
@needs_listener
@apart(shm=SIZE)
def test_arrays_that_cannot_fit_together_are_refused_before_memory_is_full() -> None:
    """Each of the three arrays alone would fit."""
    reserved: list[int] = []

    def see(call: Reservation) -> int:
        reserved.append(call.size)
        return 0

    with watched(_refused, decide=see) as refused:
        error = refused.result()
    assert f"{TOTAL} bytes in total" in str(error)
    assert error.needed == TOTAL
    assert sum(reserved) < MIB, "others would have found /dev/shm full"


@needs_own_shm
@needs_listener
@apart(shm=2 * TOTAL)
def test_an_error_names_the_total_though_others_took_the_room() -> None:
    reserved: list[int] = []

    def take_it_after_the_first_array(call: Reservation) -> int:
        if sum(reserved) > TOTAL // 3:
            return errno.ENOSPC
        reserved.append(call.size)
        return 0

    with watched(_refused, decide=take_it_after_the_first_array) as late:
        error = late.result()
    assert f"{TOTAL} bytes in total" in str(error)
    assert error.needed == TOTAL * 2 // 3
    assert testing.leaked_names() == ()


@needs_own_shm
@apart(shm=SIZE)
def test_attaching_and_writing_need_no_room() -> None:
    with SharedArrays({"a": TensorSpec((MIB,))}, NAME, unlink_on_close=True) as params:
        leave(0)
        other = SharedArrays.attach(NAME, writable=True)
        other["a"][:] = 1
        assert params["a"].sum() == MIB
        other.close()


# -- a forged, truncated or punched file ----------------------------------------------------------


def forge(file: SegmentFile, offset: int, data: bytes) -> None:
    """Overwrite bytes of the directory, with valid checksums."""
    file.write(DIRECTORY + offset, data)
    (length,) = struct.unpack("<Q", file.read(DIRECTORY_BYTES, 8))
    directory = layout.mix_words(file.read(DIRECTORY, length))
    file.write(DIRECTORY_CHECKSUM, struct.pack("<Q", directory))
    file.write(CONFIG_END, struct.pack("<Q", layout.mix_words(file.read(0, CONFIG_END))))


FORGED: Final = {
    "a size beyond what there is": (FIRST_DIM, struct.pack("<q", 1 << 30), "larger than what"),
    "a size beyond a region": (FIRST_DIM, struct.pack("<q", 1 << 38), "out of range"),
    "a size that overflows": (FIRST_DIM, struct.pack("<q", (1 << 61) + 3), "out of range"),
    "an unknown dimension": (FIRST_DIM, struct.pack("<q", -1), "not known"),
    "a negative dimension": (FIRST_DIM, struct.pack("<q", -(1 << 62)), "not known"),
    "an unknown dtype": (DTYPE, struct.pack("<I", 99), "dtype of number 99"),
    "no dtype": (DTYPE, struct.pack("<I", 0), "dtype of number 0"),
    "a sparse member": (0, struct.pack("<I", 1), "unknown shape"),
    "a name that is no text": (NAME_BYTES, b"\xff" * 8, "UTF-8"),
    "a rank beyond the directory": (RANK, struct.pack("<I", 60), "directory"),
}


@needs_own_shm
@apart(shm=SIZE)
def test_a_forged_directory_is_refused() -> None:
    for offset, data, message in FORGED.values():
        SharedArrays({"a": np.ones(3), "b": np.ones(2)}, NAME).close()
        with SegmentFile(path()) as file:
            forge(file, offset, data)
        for opener in (
            lambda: SharedArrays.attach(NAME),
            lambda: shmacc.attach(NAME),
            lambda: SharedArrays({"a": np.ones(3), "b": np.ones(2)}, NAME),
        ):
            with pytest.raises(errors.DataLossError, match=message) as caught:
                opener()
            assert names.segment_name(NAME).system_name in str(caught.value)
        inspection.list_segments()
        assert inspection.remove(NAME, force=True)


@apart()
def test_a_truncated_file_is_not_opened() -> None:
    for size in (100, PAGE, layout.REGION_SPAN, 3 * layout.REGION_SPAN + 1):
        SharedArrays({"a": np.ones(3)}, NAME).close()
        os.truncate(path(), size)
        with pytest.raises(errors.DataLossError, match=r"truncated|too short"):
            SharedArrays.attach(NAME)
        inspection.remove(NAME, force=True)


@apart()
def test_arrays_truncated_while_in_use_raise_when_read_again() -> None:
    """Arrays that were read before lose their memory; nothing else is lost."""
    params = SharedArrays({"a": np.ones(3), "b": np.ones(3)}, NAME)
    kept = params["a"]
    os.truncate(path(), 0)
    for name in ("a", "b"):
        with pytest.raises(errors.DataLossError, match="truncated"):
            params[name]
    with pytest.raises(errors.DataLossError):
        inspection.describe(NAME)
    params.close()
    del kept  # reading it would be a SIGBUS
    inspection.remove(NAME, force=True)


@needs_own_shm
@pytest.mark.parametrize("made_up_for", [False, True])
@apart(shm=SIZE)
def test_missing_pages_in_full_memory_raise(*, made_up_for: bool) -> None:
    params = SharedArrays({"a": TensorSpec((MIB,), "uint8")}, NAME)
    with SegmentFile(path()) as file:
        size = path().stat().st_size
        if made_up_for:  # the file gets as many pages elsewhere
            file.write(6 * layout.REGION_SPAN, bytes(MIB))
        file.resize(8 * layout.REGION_SPAN)  # the array's pages are gone
        file.resize(size)
        leave(0)
        error = errors.ResourceExhaustedError if made_up_for else errors.DataLossError
        with pytest.raises(error):
            SharedArrays.attach(NAME)["a"].sum()
    params.close()
    inspection.remove(NAME, force=True)


def test_arrays_whose_name_was_removed_raise() -> None:
    with SharedArrays({"a": np.ones(3)}, NAME) as params:
        kept = params["a"]
        path().unlink()
        with pytest.raises(errors.NotFoundError, match="removed under its users"):
            params["a"]
        kept += 1
        assert kept.tolist() == [2, 2, 2]
    for left in testing.leaked_names(names.current_namespace()):
        (Path(names.SHM_DIRECTORY) / left).unlink()


# -- other users ----------------------------------------------------------------------------------

OWNER, STRANGER = 61001, 61002


def _make(*, pipe: Pipe) -> None:
    with SharedArrays({"a": np.ones(3)}, NAME, mode=0o666) as params:
        pipe.turn()
        pipe.say(params["a"].tolist())


def _is_let_in() -> None:
    with pytest.raises(errors.PermissionDeniedError, match="owners="):
        SharedArrays.attach(NAME)
    with SharedArrays.attach(NAME, owners={OWNER}) as reader:
        assert reader["a"].tolist() == [1, 1, 1]
        assert not reader["a"].flags.writeable
    with SharedArrays({"a": np.zeros(3)}, NAME, owners="any") as writer:
        writer["a"][1] = 5
        with pytest.raises(errors.PermissionDeniedError):
            writer.unlink()


@needs_root
def test_users_share_arrays_that_are_open_to_all() -> None:
    with Apart(_make, uid=OWNER).ready() as process:
        run_apart(_is_let_in, uid=STRANGER)
        assert process.turn() == [1, 5, 1]
    inspection.remove(NAME, force=True)
