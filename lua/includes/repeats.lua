-- The same command id gets its first answer again; another body under it is a conflict.
-- Needs KEYS[3] (refusals) and the includes `decide`, `records`.

-- Refusals are kept for the whole shard, so their field names the campaign too; '/' cannot stand in an id.
local function refusal_field(campaign, id)
  return campaign .. '/' .. id
end

-- The row of an earlier answer, or nil. `record` and `refusal` are what is kept under the id, or false.
-- A row is {code, seq, at, amount, quantity, place, left, repeated}; `left_of(place)` gives what was left behind a grab.
local function repeated_row(record, refusal, digest, now, parts)
  if record then
    local code, seq, at, place, amount, kept = unpack_answer(record)
    if kept ~= digest then return {CONFLICT, 0, now} end
    if code == 0 then return {code, seq, at, amount, 1, place, parts - place, 1} end
    return {code, seq, at, amount, 0, 0, place, 1}
  end
  if refusal then
    local code, at, kept = unpack_refusal(refusal)
    if kept ~= digest then return {CONFLICT, 0, now} end
    return {code, 0, at, 0, 0, 0, 0, 1}
  end
end
