"""dm_control's suite in JAX: the same tasks, pure functions, any batch size."""
