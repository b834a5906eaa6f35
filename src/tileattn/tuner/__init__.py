"""The tuner: measures a backend's configurations for a call, and keeps the fastest for later calls and processes.

    state.py     whether `tuning()` is open, and who must forget what it prepared when a result changes
    results.py   what was measured, by device, call and sizes; the file that keeps it
    space.py     what a backend tells about the configurations of a call
    search.py    from candidates to the fastest one that is right
    timing.py    how long candidates take, hopeless ones not for long
    session.py   `tileattn.tuning()`: tunes the calls that are made inside
    progress.py  how far a search is, on stderr

Backends read `results` and describe their `space`; the rest lies above dispatch. Nothing is tuned unasked.
"""
