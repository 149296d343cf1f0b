"""
`tieringd recover`: topics of the archive, brought back.

`selection` finds them and `validation` looks at them first; `directory` builds logs for a broker that is
stopped, and `cluster` writes records into one that runs. `commands` is what an operator sees.
"""
