"""The suite `decode` of `tileattn bench`: one new query per sequence over caches of keys and values.

Its measure is bandwidth, not TFLOPS: decoding reads each key and value once. So it has its own cases (:mod:`.cases`),
caches (:mod:`.problem`), timing (:mod:`.timing`), ceilings (:mod:`.ceilings`) and result files (:mod:`.results`).
"""
