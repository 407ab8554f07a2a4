"""Ranks: the processes of one training. They exchange short texts through the key-value store of their
process group, and never through a collective. So a rank that works alone never meets a collective of another
rank.

In: texts of this rank. Out: checked texts of the other ranks.

    rank_store          RankStore: texts of all ranks, read with a time limit and checked like files
    agreement           Agreement: versions, options and collectives that must be the same on all ranks
    host_share          the share of one rank in its host: drives, and their measured bandwidth
    collective_times    durations of collectives without the wait for other ranks
    collective_names    names of torch's operators for collectives
    collectives         which errors collectives raise, and which threads wait in collectives
    processes           RankProcess: whether the process of a rank of this host has ended
    failures            RankFailures: the error that has ended a rank's program, for the other ranks
    connections         whether the server of a key-value store has closed a connection

Invariant: no function of this package waits for another rank without a time limit.

Log lines:

    "teraio: ... This rank ends too, unless rank ... goes on"    another rank has failed
"""
