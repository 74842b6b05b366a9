# SPDX-License-Identifier: Apache-2.0
"""The sweep: every operator of torch's own operator database, against the untransformed function.

`samples` enumerates what torch tests, `kinds` are the programs made of one sample, `verdicts` says
whether such a program is bitwise eager's, `run` goes through all of it in worker processes, and
`page` writes docs/operators.md.

    make sweep                                   # all of it, about half an hour on one core
    make sweep ARGS="--only '^linalg' --jobs 2"
"""
