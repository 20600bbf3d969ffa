#!lua flags=allow-oom
-- Passes the lease of a shard from its holder to another worker, which learns that at its next renewal. The
-- former holder relays the shard until the other has taken it over. A worker that leaves is no longer in the
-- list of those that are present (lease.lua), and gets none: it would not return it. It takes back a lease
-- that it passed on, and then returns it.
--
-- KEYS[1] lease string · KEYS[2] present hash
-- ARGV[1] holder · ARGV[2] next holder · ARGV[3] milliseconds · ARGV[4] '1' if the next holder takes it back
-- Returns 1; or 0 when another worker or none has the lease, or the next holder is not present.

if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
if ARGV[4] ~= '1' and redis.call('HEXISTS', KEYS[2], ARGV[2]) == 0 then return 0 end
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
return 1
