"""Tasks by prompt: a form says how a task becomes a text to continue, and which part of what follows is the answer."""

from ortgpt.tasks.form import AnswerRule, TaskForm, form_names, form_text, read_form
from ortgpt.tasks.run import TaskResult, run_task, run_task_batch

__all__ = ["AnswerRule", "TaskForm", "TaskResult", "form_names", "form_text", "read_form", "run_task", "run_task_batch"]
