"""A long run of chaos.py, on a cluster whose links can be cut and whose head can be restarted.

test_chaos.py runs it as a program: a process can connect to Ray only once, and this one does so
from a network namespace. Its arguments: the seconds, and why links cannot be cut ("": they can).
"""

import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from on_ray.wires import Wires

if __name__ == "__main__":  # before Ray has any thread
    SECONDS, NO_WIRES = float(sys.argv[1]), sys.argv[2]
    WIRES = None if NO_WIRES else Wires(4, delay=(0.0005, 0.0002), loss=0.0)

from on_ray.chaos import Chaos
from on_ray.nodes import Nodes


def main() -> None:
    if NO_WIRES:
        sys.stdout.write(f"no links are cut: {NO_WIRES}\n")
    folder = Path(tempfile.mkdtemp())
    os.chdir(folder)  # Ray puts the current folder into its workers' path
    (folder / "head").mkdir()
    nodes = Nodes(WIRES, folder / "head")
    try:
        with nodes.on(0):
            chaos = Chaos(nodes, folder, SECONDS)
            try:
                chaos.run()
            finally:
                chaos.end()
            sys.stdout.write(f"{dict(chaos.happened)}\n")
            left = nodes.left()
            assert left == [], left
    finally:
        nodes.end()


if __name__ == "__main__":
    main()
