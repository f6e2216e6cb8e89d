"""Gunicorn reads this file by its name: `gunicorn 'app:create_app()'` in this folder."""

import os

bind = "127.0.0.1:8000"
workers = int(os.environ.get("WEB_CONCURRENCY", "2"))
# In a container with a CPU quota, set CPUS: os.cpu_count() counts the CPUs of the machine.
cpus = int(os.environ.get("CPUS") or os.cpu_count() or 1)
# Each worker has its own copy of the model. If each used all CPUs, the workers would slow each other down.
raw_env = [f"ORTGPT_THREADS={max(1, cpus // workers)}"]

# A worker of this class answers up to `threads` requests at a time; further ones wait in the socket's backlog. So at
# most workers * threads generations run at a time.
worker_class = "gthread"
threads = 4

# create_app() runs in the worker, after the fork: the threads of ONNX Runtime stay in the parent. With preload_app,
# load with reload_after_fork=True; each worker then loads the model once more.
preload_app = False

# With gthread this finds a worker that hangs, not a slow request: app.py limits each generation by timeout_s.
timeout = 30
# After SIGTERM a worker may finish its requests for this long; what runs then is ended.
graceful_timeout = 5
