-- Runs: the grabs that a call grants, or holds, of one offer in a row are one event in columns
-- (models/runs.py). A run takes as many seqs as it has grabs.
--- @include "cost"
--- @include "undo"
--- @include "packed_values"

-- The greatest amount, and the greatest product of price and quantity.
local AMOUNT_MAX = 1e13

-- Returns a number that may be joined to an event's text; raises for any other. Lua writes 14 digits: a
-- longer number would be rounded, and no number in an event has a fraction. Called only before the first
-- write of a script, so nothing has changed when it raises.
local function int(number)
  if number < 1e14 and number >= 0 and number % 1 == 0 then return number end
  error('not an integer from 0 to 99999999999999: ' .. tostring(number))
end

-- Takes the next seq. The caller then adds the event's line to `call.lines`.
local function next_seq(call)
  call.seq = call.seq + 1
  return call.seq
end

-- Integers as text, with commas between them. Small ones are looked up; the others are formatted in one step:
-- `table.concat` formats each as a floating-point number, which costs three times as much.
local numbers_text
do
  local TEXTS, TEXTS_MAX = {}, 10000

  function numbers_text(numbers, count)
    local texts = {}
    for i = 1, count do
      local number = numbers[i]
      if number >= TEXTS_MAX then
        return string.format(string.rep('%d,', count - 1) .. '%d', unpack(numbers, 1, count))
      end
      local text = TEXTS[number]
      if not text then
        text = string.format('%d', number)
        TEXTS[number] = text
      end
      texts[i] = text
    end
    return table.concat(texts, ',')
  end
end

-- Adds a grab to the run of the call: {type, offer, rules, basket, served_by, seq, offer_seq, place: of the
-- first grab; count; bytes: of the columns; left: units after the last grab; ids, users, quantities, amounts,
-- or ids_text, users_text, amounts_text where a column is known as text; rare}. Begins a new run where the
-- last one was of another offer, rules or basket, or is full. `rare` has, for columns that only some grabs
-- have, the text of this grab's value: asked, attributes, tickets, digests, codes. `served_by` is the command
-- that made units free, if the grab was queued; then the run was decided together with the event before it.
local add_grab
-- Ends the run of the call, if there is one: adds its line.
local end_run
do
  local GRABS_MAX, BYTES_MAX = 1000, 131072
  -- In the order of models/runs.py, with the value of a grab that has none.
  local RARE = {{'asked', 'null'}, {'attributes', 'null'}, {'metadata', 'null'}, {'tickets', 'null'}}
  local RARE_LAST = {{'digests', '"' .. PLAIN .. '"'}, {'codes', '[]'}}

  local function texts_of(columns, rare, count)
    local text = ''
    for _, column in ipairs(columns) do
      local values = rare[column[1]]
      if values then
        for i = 1, count do values[i] = values[i] or column[2] end
        text = text .. ',"' .. column[1] .. '":[' .. table.concat(values, ',') .. ']'
      end
    end
    return text
  end

  -- The end of a run's text: what all holds of the run have in common.
  local function hold_end(call, rules)
    return ',"deadline_at":' .. int(call.now + rules.hold_ms)
      .. (rules.currency and ',"price":' .. int(rules.price or 0) .. ',"currency":"' .. rules.currency .. '"'
        or '')
  end

  -- The text is joined once, at the end: Lua hashes every string that it makes, so each longer text that is
  -- made on the way would cost as much as all the shorter ones.
  function end_run(call)
    local run = call.run
    if not run then return end
    call.run = nil
    local offer, count = run.offer, run.count
    call.lines[#call.lines + 1] = string.format(
      '{"type":"%s","v":2,"shard":%s,"seq":%d,"offer_seq":%d,"offer":"%s","at":%d,%s"grabs":["',
      run.type, call.shard, run.seq, run.offer_seq, offer.name, call.now,
      run.served_by and '"command":"' .. run.served_by .. '",' or '')
      .. (run.ids_text or table.concat(run.ids, '","', 1, count)) .. '"],"users":["'
      .. (run.users_text or table.concat(run.users, '","', 1, count))
      .. (run.has_quantities and '"],"quantities":[' .. numbers_text(run.quantities, count) .. '],' or '"],')
      .. (run.amounts_text and '"amounts":[' .. run.amounts_text .. '],'
        or run.amounts and '"amounts":[' .. numbers_text(run.amounts, count) .. '],' or '')
      .. '"asset":"' .. offer.asset .. string.format('","place":%d,"left":%d', run.place, run.left)
      .. texts_of(RARE, run.rare, count) .. (run.basket and ',"basket":"' .. run.basket .. '"' or '')
      .. texts_of(RARE_LAST, run.rare, count)
      .. (run.type == 'grab.held' and hold_end(call, run.rules) or '')
      .. (run.served_by and ',"waited":true}' or '}')
    call.seqs[#call.lines] = count
    call.joined[#call.lines] = run.served_by and true or nil
  end

  function add_grab(call, type, offer, id, user, quantity, amount, basket, rare, served_by)
    local run, bytes = call.run, #id + #user
    for _, text in pairs(rare) do bytes = bytes + #text end
    -- The line may be as long again: numbers, what separates values, and values of grabs that have none.
    if run and (run.offer ~= offer or run.rules ~= offer.rules or run.basket ~= basket
        or run.served_by ~= served_by or run.count == GRABS_MAX or run.bytes + bytes > BYTES_MAX) then
      end_run(call)
      run = nil
    end
    -- A run has the price only; readers multiply.
    if type == 'grab.held' then int((offer.rules.price or 0) * quantity) end
    spend(COST.event)
    put(offer, 'offer_seq', offer.offer_seq + 1)
    put(offer, 'changed', true)
    local seq = next_seq(call)
    if not run then
      run = {type = type, offer = offer, rules = offer.rules, basket = basket, served_by = served_by,
        seq = seq, offer_seq = offer.offer_seq, place = offer.places, count = 0, bytes = 0, ids = {},
        users = {}, quantities = {}, amounts = not offer.pieces and {}, rare = {}}
      call.run = run
    end
    local n = run.count + 1
    run.count, run.left = n, offer.units_left
    run.ids[n], run.users[n], run.quantities[n] = id, user, int(quantity)
    if run.amounts then run.amounts[n] = int(amount) end
    if quantity ~= 1 then run.has_quantities = true end
    for name, text in pairs(rare) do
      run.rare[name] = run.rare[name] or {}
      run.rare[name][n] = text
    end
    run.bytes = run.bytes + bytes
    spend(COST.line_byte * bytes)
  end
end

-- Adds the run of the plain grabs of a call, whose columns are known. The caller then changes the numbers of
-- call and offer.
local function end_whole_run(call, offer, type, ids, users, grabs, texts, amounts_text)
  local is_whole = grabs == texts[3]
  call.run = {type = type, offer = offer, rules = offer.rules, seq = call.seq + 1,
    offer_seq = offer.offer_seq + 1, place = offer.places + 1, left = offer.units_left - grabs,
    count = grabs, rare = {},
    ids_text = is_whole and texts[1] or table.concat(ids, '","', 1, grabs),
    users_text = is_whole and texts[2] or table.concat(users, '","', 1, grabs), amounts_text = amounts_text}
  end_run(call)
end
