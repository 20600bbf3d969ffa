"""Where decisions are made: the scripts, the loader that assembles them, the keys, and the gate, their Python
face.
"""
