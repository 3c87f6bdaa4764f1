"""Questions with a short answer, and a Python interpreter to find it with."""
