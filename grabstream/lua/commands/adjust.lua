#!lua flags=allow-oom
-- Adds correcting entries to the ledger, with a reason and an approval.
--
-- Command: adjust
-- KEYS[1] shard hash · KEYS[2] outbox stream · KEYS[3] refusals hash · KEYS[4] refusal_order list ·
--   KEYS[5] demand hash
-- KEYS[6] due zset · KEYS[7] offers set · KEYS[8] holds zset · KEYS[9] campaigns hash · KEYS[10] retired set
-- KEYS[11] past zset · KEYS[12] cleaning hash
-- KEYS[13 …] ten keys for each offer, then five for each campaign, see includes/offers.lua
-- ARGV[1] shard/shards · ARGV[2] caller time ms · ARGV[3] time to use ms or '' · ARGV[4] clock skew ms ·
--   ARGV[5] ''
-- ARGV[6] msgpack, see includes/command.lua; a body: {whole: the event's fields as text, operator, signers}
-- Outcomes: 21 fenced (whole call) · 23 conflict · 24 no_such_offer · 14 adjusted
-- Events: ledger.adjusted
-- Returns msgpack: {0, history, rows} as grab does, or {code, retry_at, message}.
--- @include "decide"
--- @include "offers"
--- @include "command"

return carry_out(function(call, offer, id, digest, body)
  add_line(call, event_head(call, offer, 'ledger.adjusted', id) .. body.whole .. senders_text(body)
    .. ',"digest":"' .. digest .. '"}')
  return done_row(call, offer, CODE.adjusted), true
end)
