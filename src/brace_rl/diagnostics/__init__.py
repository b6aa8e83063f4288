"""From logged tensors to figures: pure functions, torch alone. See :mod:`brace_rl.diagnostics.batch`."""
