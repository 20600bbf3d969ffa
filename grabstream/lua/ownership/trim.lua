#!lua flags=allow-oom
-- Removes from the outbox the events that Kafka acknowledged, stores the checkpoint, and announces the events
-- as journaled. The same call reads the events after them, since the relay continues there.
--
-- KEYS[1] shard hash · KEYS[2] outbox stream
-- ARGV[1] term · ARGV[2] owner · ARGV[3] server epoch · ARGV[4] last seq acknowledged ·
--   ARGV[5] the chain's hash there, hex
-- ARGV[6] journal offset after it · ARGV[7] channel of announcements
-- ARGV[8] term · ARGV[9] owner in force at that offset: of a recovery, not those of the caller
-- ARGV[10] entries to read at most
-- Returns {seq of the shard, entries, why the shard needs a takeover or '', '1' when acknowledged entries are
--         left, since a call trims a bounded number of them, else ''}: the first three as read_outbox, from
--         the first event after those acknowledged; or the error LOST when the shard has another owner.
--- @include "shard"
--- @include "outbox"

local ENTRIES_MAX = 1000

local lost = lost_ownership()
if lost then return lost end
local seq, wanted = tonumber(ARGV[4]), tonumber(ARGV[10])
local shard = redis.call('HMGET', KEYS[1], 'seq', 'history')
local history = shard[2] or ''
local fault = fault_for_owner(KEYS[1], ARGV[3])
local open = entry_at(seq + 1)
-- An entry is removed only when its last event is acknowledged: this entry may also hold the first event that
-- is not acknowledged.
local holds = open and tonumber(string.match(open[1], '^(%d+)')) + seqs_of(open[2]) - 1 > seq
local entries = wanted > 0 and entries_from(holds and open or entry_after(open), wanted) or {}
local more = false
if open then
  local least = holds and open[1] or string.format('%d-0', seq + 1)
  -- Removes whole nodes of the stream first, a bounded number; little is then left in one node.
  more = redis.call('XTRIM', KEYS[2], 'MINID', '~', least, 'LIMIT', ENTRIES_MAX) > 0
    and redis.call('XTRIM', KEYS[2], 'MINID', '~', least, 'LIMIT', ENTRIES_MAX) > 0
  if not more then redis.call('XTRIM', KEYS[2], 'MINID', least) end
end
redis.call('HSET', KEYS[1], 'journaled_seq', ARGV[4], 'journaled_head', ARGV[5], 'journaled_offset', ARGV[6],
  'journaled_term', ARGV[8], 'journaled_owner', ARGV[9])
redis.call('PUBLISH', ARGV[7], history .. ' ' .. ARGV[4])
return {shard[1] or '0', entries, fault, more and '1' or ''}
