"""The kill matrix: faults of every server and of workers under traffic of users and operators; afterwards all
checks must pass.
"""
