-- Coupon codes that are loaded in chunks. An offer takes each code once, although the scripts cannot read
-- codes. A sealed code is `<key id>:<base64>` or `<key id>~box:<base64>`. The base64 begins with the name of
-- the code: within an offer, the same code sealed with the same key has the same name (crypto/sealing.py).
-- Names are kept until the list is complete or the offer closes, because nothing can be loaded after that.

-- The name has NAME_LENGTH characters (crypto/sealing.py).
local KEY_AND_NAME =
  '^([^:~]+)[^:]*:([%w+/][%w+/][%w+/][%w+/][%w+/][%w+/][%w+/][%w+/][%w+/][%w+/][%w+/][%w+/])'

-- Adds a chunk of sealed codes to a list. `list` is the loading state before this chunk (or nil), `loaded`
-- the loading state with it.
local function add_codes(offer, list, loaded, items)
  for _, code in ipairs(items) do offer.codes_new[#offer.codes_new + 1] = code end
  if loaded.loaded == loaded.chunks then
    offer.names_new, offer.names_seen, offer.names_gone = nil, nil, true
    return
  end
  loaded.keys = list and list.keys or {}
  offer.names_new, offer.names_seen = offer.names_new or {}, offer.names_seen or {}
  for _, code in ipairs(items) do
    local key, name = string.match(code, KEY_AND_NAME)
    if key then
      offer.names_new[#offer.names_new + 1] = name
      offer.names_seen[name] = true
      local keys = loaded.keys
      local is_known = false
      for _, known_key in ipairs(keys) do is_known = is_known or known_key == key end
      if not is_known then keys[#keys + 1] = key end
    end
  end
end
