"""Run, resume and report experiments.

From ``covon run`` to a training step:

1. ``recipe``: what to compare, with ``data_settings`` and the strategies of ``registry``.
2. ``grid``: every strategy with every seed, in the processes of ``worker_pool``; or ``cluster``.
   ``search``: the trials of each strategy instead.
3. ``run``: one run, in its ``run_folder``, whose name follows from ``run_settings``, from data to
   ``result``.
4. ``build``: benchmark, model and Avalanche strategy, whose training loop is Avalanche's.
5. ``resumable``: the part of this loop that stores and restores a run, as the plain values of
   ``state``, in the files of ``checkpoint``.
"""
