"""Every build with layout version 3 can continue with segments that an earlier build left.

The stored file has a group with two lanes, in its second round, and parameters that the first round
updated. It holds both segments page by page, as two processes left them when they ended. A change
of the layout that fails here needs a new layout version, and then a new file.
"""

import base64
import json
import os
import zlib
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

import shmacc
from shmacc._base import layout, names

FILES: Final = json.loads(Path(__file__).with_name("segments_of_version_3.json").read_text())


def put_back(name: str, file: dict[str, Any], namespace: str) -> None:
    path = Path(names.SHM_DIRECTORY) / name.replace("{namespace}", namespace)
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    os.ftruncate(descriptor, file["size"])
    for begin, length, content in file["pieces"]:
        os.posix_fallocate(descriptor, begin, length)
        os.pwrite(descriptor, zlib.decompress(base64.b85decode(content)), begin)
    os.close(descriptor)


@pytest.mark.skipif(layout.LAYOUT_VERSION != 3, reason="of layout version 3")
def test_a_run_stored_with_layout_version_3_can_continue(namespace: str) -> None:
    for file_name, file in FILES.items():
        put_back(file_name, file, namespace)
    with (
        shmacc.Parameters.attach("params") as params,
        shmacc.AccumulatorGroup.attach("group") as group,
    ):
        learnt = np.zeros((6, 2), np.float32)
        learnt[[1, 4]] = -0.5 / np.sqrt(np.float32(1.1))
        np.testing.assert_allclose(params["table"], learnt, rtol=1e-6)
        assert group.apply({"table": ([5], np.ones((1, 2)))}, 1, contributor=8)
        assert group.apply({"table": ([5], np.ones((1, 2)))}, 1, contributor=7)  # repeated
        assert group.stats().repeated == 1
        assert not group.apply({"table": ([5], np.ones((1, 2)))}, 0, contributor=9)  # stale
        with group.round(2, timeout=0) as taken:
            table = taken["table"]
            assert table.indices.tolist() == [0, 4, 5]
            assert table.values.tolist() == [[3, 3], [3, 3], [1, 1]]
            assert taken.contributors.tolist() == [7, 8]
            params.update(taken)
        assert group.global_step == 2
        assert (params["table"] < 0).any(axis=1).tolist() == [True, True, False, False, True, True]
        group.unlink()
        params.unlink()
