"""
Jobs on an archive, each a function: a session, a configuration and what is wanted in, a `Report` out.

`tieringd spark NAME` starts them; see `tieringd.cli.spark`.
"""
