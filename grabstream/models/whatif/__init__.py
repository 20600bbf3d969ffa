"""What if: past commands of a campaign, decided again by the pure rules under changed terms.

`causes` finds the command behind each event of the journal, `twins` decides it in two states (as recorded,
and under the changed terms), `numbers` adds up the results of the offers in each.
"""
