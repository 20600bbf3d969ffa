"""The kill matrix: faults of every server and of workers, while people grab, hold, pay and operators amend;
then it all must add up.
"""
