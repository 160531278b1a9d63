"""Makes assertions of the extension fail: those that ask whether this thread holds a lock.

To answer, they call `pthread_self`. In a process with `PRELOADED`, the extension's n-th question
gets a wrong answer. `main` makes a scene's call in forks of such a process, with the first answer
wrong, then the second, until the call asks no more. It checks that each fork has done all of the
call or nothing, and that another process goes on at once.
"""

import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any, Final

from helpers import killing_updates
from helpers.killing_scenes import NAME, GroupScene, path
from helpers.killing_updates import GROUP, PARAMS, TableScene, UpdateScene
from helpers.support import SOON, slept

import shmacc
from shmacc import AccumulatorGroup, Parameters, errors, optim

PRELOADED: Final = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <string.h>
long wrong_at;  /* so many questions until the wrong answer; 0: there is none */
pthread_t pthread_self(void) {
    static pthread_t (*real)(void);
    Dl_info by;
    if (!real) *(void **)&real = dlsym(RTLD_NEXT, "pthread_self");
    if (wrong_at && dladdr(__builtin_return_address(0), &by) && strstr(by.dli_fname, "/_core."))
        if (--wrong_at == 0) return 1;
    return real();
}
"""
# How a call may end, besides with InternalError.
DIED: Final = "died"  # an assertion in a destructor has ended the process
RETURNED: Final = "returned"  # the question was not an assertion's, or did not matter
ALL_RIGHT: Final = "all right"  # all answers were right


def _twice(group: Any) -> None:
    for seed in range(2):
        assert group.apply(OF.gradient(*range(40), seed=seed), 0)


def _apply(group: Any) -> None:
    assert group.apply(OF.gradient(*range(0, 60, 2), seed=5), 0)


OF: Final = GroupScene("", "float64", 3, _twice, _twice)
_SCENES: Final = (
    GroupScene("apply", "float64", 3, _twice, _apply, (2, 70)),
    GroupScene("take", "float64", 3, _twice, lambda group: group.take(2, timeout=0), (2, 70)),
    GroupScene("step", "float64", 3, _twice, lambda group: group.advance_step(4), (2, 70), lanes=3),
    GroupScene("restore", "float64", 3, _twice, lambda both: both[0].restore(both[1]), (2, 70),
               lambda group: (group, group.state()), 3),
)  # fmt: skip
_UPDATES: Final = (
    UpdateScene("update", optim.Adam(0.1), lanes=2),
    TableScene("table", optim.Adagrad(0.5), there=tuple(range(20)), gone=(1, 3),
               changed=(0, 2, 30, 31), removed=(5,)),
)  # fmt: skip
KINDS: Final = tuple(scene.name for scene in (*_SCENES, *_UPDATES))


class _Group:
    """A scene with one segment."""

    def __init__(self, scene: GroupScene) -> None:
        self._scene = scene
        self._image = scene.prepare()
        self._known = [scene.testimony(self._image), scene.testimony(scene.perform())]

    def begin(self) -> Callable[[], object]:
        group = shmacc.attach(NAME)
        begun = self._scene.begin(group)
        return lambda: self._scene.operation(begun)

    def reset(self) -> None:
        self._image.write(path())

    def look(self) -> None:
        with shmacc.attach(NAME) as group:
            group.state()

    def is_done(self) -> bool:
        return bool(self._known.index(self._scene.testify()))


class _Update:
    """A scene with a group and parameters."""

    def __init__(self, scene: UpdateScene) -> None:
        self._scene = scene
        self._images = killing_updates.images(scene)
        self._known = killing_updates.states(scene)

    def begin(self) -> Callable[[], object]:
        group, params = AccumulatorGroup.attach(GROUP), Parameters.attach(PARAMS)
        return lambda: self._scene.one_round(params, group)

    def reset(self) -> None:
        for name, image in self._images.items():
            image.write(path(name))

    def look(self) -> None:
        with AccumulatorGroup.attach(GROUP) as group, Parameters.attach(PARAMS) as params:
            group.state()
            params.state()

    def is_done(self) -> bool:
        with AccumulatorGroup.attach(GROUP) as group, Parameters.attach(PARAMS) as params:
            if group.global_step == 2:  # the block's end has consumed the round
                assert killing_updates.state(params) == self._known[1]
                assert group.num_accumulated() == 0
                group.unlink()
                params.unlink()
                return True
        killing_updates.testify(self._scene, self._known)
        return False


def main() -> None:
    """Write, for each question, the error that ended the call, and whether the call was done."""
    library, kind = sys.argv[1:]
    wrong_at = ctypes.c_long.in_dll(ctypes.CDLL(library), "wrong_at")
    scenes: dict[str, Any] = {scene.name: (_Group, scene) for scene in _SCENES}
    scenes |= {scene.name: (_Update, scene) for scene in _UPDATES}
    make, scene = scenes[kind]
    json.dump(list(_ends(make(scene), wrong_at)), sys.stdout)


def _ends(scene: _Group | _Update, wrong_at: ctypes.c_long) -> Iterator[tuple[str, bool]]:
    for number in count(1):
        scene.reset()
        said, go_on = os.pipe(), os.pipe()
        pid = os.fork()
        if pid == 0:
            for end in (said[0], go_on[1]):
                os.close(end)
            _call(scene.begin(), wrong_at, number, said[1])
            os.read(go_on[0], 1)
            os._exit(0)
        for end in (said[1], go_on[0]):
            os.close(end)
        with os.fdopen(said[0]) as answer, os.fdopen(go_on[1], "w"):
            error = answer.readline().strip()
            since = slept()
            scene.look()  # while the process lives
            assert slept() - since < SOON, f"question {number}: another process slept"
        status = os.waitpid(pid, 0)[1]
        assert status == 0 if error else os.WTERMSIG(status) == signal.SIGABRT, status
        done = scene.is_done()
        assert done or error != RETURNED
        yield error or DIED, done
        if error == ALL_RIGHT:
            return


def _call(call: Callable[[], object], wrong_at: ctypes.c_long, number: int, to: int) -> None:
    wrong_at.value = number
    try:
        call()
        error = RETURNED if wrong_at.value == 0 else ALL_RIGHT
    except errors.InternalError as failed:
        error = str(failed).replace("\n", " ")
    except BaseException as failed:  # noqa: BLE001 - it is reported, and fails the test
        error = f"not expected: {failed!r}"
    wrong_at.value = 0
    os.write(to, f"{error}\n".encode())


if __name__ == "__main__":
    main()
