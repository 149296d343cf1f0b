"""
`tieringd recover`: bring archived topics back.

`selection` finds the topics, and `validation` checks their archives first. `directory` builds logs for a
stopped broker, and `cluster` writes records into a running cluster. `commands` has the command line.
"""
