-- The same command id gets its first answer again; another body under it is a conflict.
-- Needs KEYS[3] (refusals) and the includes `decide`, `records`.

-- Refusals are kept for the whole shard, so their field names the campaign too; '/' cannot stand in an id.
local function refusal_field(campaign, id)
  return campaign .. '/' .. id
end

-- Whether what is kept under the id was the same body.
local function is_repeat(record, refusal, digest)
  if record then return string.sub(record, ANSWER_BYTES - 7, ANSWER_BYTES) == digest end
  return string.sub(refusal, 7, 14) == digest
end

-- The row of what is so already: it names the event that made it so.
local function again_row(code, seq, at, quantity)
  return {code, seq, at, 0, quantity or 0, 0, 0, 1, 0, {again = true}}
end

-- The row of an earlier answer, or nil. `record` and `refusal` are what is kept under the id, or false.
-- A row is {code, seq, at, amount, quantity, place, left, repeated, retry_at, more}; `parts` are those of the offer.
local function repeated_row(record, refusal, digest, now, parts)
  if record then
    local code, seq, at, place, amount, kept = unpack_answer(record)
    if kept ~= digest then return {CODE.conflict, 0, now} end
    local _, row = unpack_row(record)
    if row then
      row[8] = 1
      return row
    end
    if code == 0 then return {code, seq, at, amount, 1, place, parts - place, 1} end
    return {code, seq, at, amount, 0, 0, place, 1}
  end
  if refusal then
    local code, at, kept, seq, quantity = unpack_refusal(refusal)
    if kept ~= digest then return {CODE.conflict, 0, now} end
    if seq then return again_row(code, seq, at, quantity) end
    return {code, 0, at, 0, 0, 0, 0, 1}
  end
end
