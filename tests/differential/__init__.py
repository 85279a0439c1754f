"""Whatever the bare handler does right, the wrapped one does right."""
