"""The decider, which decides the commands of the topic, and the sweeper, which handles what is due by
time.
"""
