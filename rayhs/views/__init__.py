"""A dataset as other libraries like it; each module imports its library, so they are imported when asked for."""
