"""The tuner: it times all configurations of a kernel for a call and stores the fastest on disk.

    state.py     the open session, if any, and the tables of prepared calls to empty when a result changes
    results.py   the results by device, call and sizes, and the file that stores them
    space.py     the configurations of a call, as a backend describes them
    search.py    compiles, checks and times the candidates
    timing.py    the race: rounds of timing in which slow candidates drop out
    session.py   `tileattn.tuning()`: tunes the calls made inside it
    progress.py  the progress of a search, on stderr

Backends read `results` and describe their `space`. Dispatch knows only `state`. Tuning happens only inside `tuning()`.
"""
