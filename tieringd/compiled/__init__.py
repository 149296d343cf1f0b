"""
Loops over batches in machine code, where numba is installed: the extras `compiled` and `spark` have it.

`machine_code` compiles functions, `walks` says what a walk over batches takes and gives, `batch_walk` is one
in machine code, and `loading` loads it when it is first wanted. Everything works without numba too, with more
CPU.
"""
