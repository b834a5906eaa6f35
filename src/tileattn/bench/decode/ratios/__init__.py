"""The suite `decode-ratios` of `tileattn bench`: what options of a decode call cost, against plain calls.

Its rows, caches, timing and result files are those of the suite `decode`; each row has methods of its own, of which
pairs are compared (:mod:`.cases`), and the measure is the ratio of their times (:mod:`.report`).
"""
