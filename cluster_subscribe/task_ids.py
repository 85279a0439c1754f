"""Task ids: which of them a database can store and look for."""


def is_valid_task_id(task_id: str) -> bool:
    """Whether a database can look for an id: none takes half a surrogate, PostgreSQL no NUL."""
    return '\0' not in task_id and task_id.encode(errors='ignore').decode() == task_id
