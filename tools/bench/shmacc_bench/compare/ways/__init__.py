"""The compared ways to train with several processes: a module each, as short as possible.

Each has ``ranks(workers)``, the ranks of the workers that are processes beside the chief;
``share(task, workers)``, the object that all processes get; ``lead(shared, task, workers, judge)``,
the chief's work, until the judge is satisfied; and ``work(shared, task, rank)``, a worker's.
If ``TOGETHER`` is true, the death of one process ends all, and all are started again.
"""
